"""A sweep's folder: prompts, runs, results."""
