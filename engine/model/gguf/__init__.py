"""Models in GGUF files: one file, or several parts of it, with weights, config, tokenizer and chat template."""
