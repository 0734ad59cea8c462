"""The ledger: runs and flags, which backwards write and steps of optimizers read."""
