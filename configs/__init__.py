"""Floor 1: what did the user ask for? Imports OmegaConf and nothing heavier."""
