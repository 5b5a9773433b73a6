"""What words stand for: code by name, words that packages add to, and names that are imported on first use."""
