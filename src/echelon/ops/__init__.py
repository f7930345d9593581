"""Pure maths of learning and measuring, checked against numbers worked out by hand."""
