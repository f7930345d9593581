"""Training of any agent: learners behind one interface, checkpoints, many seeds at once."""
