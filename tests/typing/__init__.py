"""What type checkers read."""
