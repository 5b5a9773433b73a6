"""Servers that speak OpenAI's protocol and take and give token ids."""
