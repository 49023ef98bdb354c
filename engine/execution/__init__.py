"""Execution turns a plan into launches on a device, and brings its tokens back."""
