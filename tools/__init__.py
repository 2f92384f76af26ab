"""Tools of a checkout; none of them is installed."""
