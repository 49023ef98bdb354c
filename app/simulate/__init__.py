"""`penstock simulate`: how the policies would do on a machine and a traffic that need not exist."""
