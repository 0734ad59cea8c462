"""The list of passes, and the code that runs and checks them."""
