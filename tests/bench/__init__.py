"""Tests of the races: statistics, records, and that wrong contestants are refused."""
