"""Files that clients upload, and batches: the requests in a file, run when there is room for them."""
