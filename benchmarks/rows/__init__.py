"""The rows of the table: each module has `measure(rounds)`, which returns its `Row`s."""
