"""Serving: a trained run as a bundle, and the policies that decide from one, without torch."""
