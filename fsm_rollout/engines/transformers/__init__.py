"""A real model in this process: transformers with continuous batching."""
