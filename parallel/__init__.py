"""Floor 3: which rank holds which rows and heads, and how do they move? Never imports Ray."""
