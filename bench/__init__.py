"""`make bench`: what a call of the frozen plugin costs, in units of a program that does nothing."""
