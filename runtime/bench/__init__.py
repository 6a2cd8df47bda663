"""`raylysses bench`: experiments on the ranks that a configuration gives."""
