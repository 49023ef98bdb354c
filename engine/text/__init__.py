"""Text: tokens of text and text of tokens, and what a text may be or end with. Plain Python, without tensors."""
