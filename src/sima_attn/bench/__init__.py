"""Measure -> rows -> tables and figures."""
