"""Microbenchmarks and measurements for those who change Penstock: `python -m lab.bench`. No wheel has them."""
