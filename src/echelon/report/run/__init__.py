"""The report of a trained run: its page, its tables, and how far its numbers can be believed."""
