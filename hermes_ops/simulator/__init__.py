"""Virtual time behind the same loop and the same policies that run live."""
