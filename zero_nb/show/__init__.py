"""Pictures and tables. The only room that imports matplotlib, and only inside functions."""
