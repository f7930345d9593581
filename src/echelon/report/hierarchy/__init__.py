"""What only the report of a hierarchy has: command, attribution, risk, population."""
