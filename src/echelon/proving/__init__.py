"""Markets whose answer is known, and what an agent makes of them."""
