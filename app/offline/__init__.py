"""`from penstock import LLM`: the server's engine, lanes and caches inside a program of one's own, without HTTP."""
