"""Replicas of one server behind one address: Ray starts and restarts them, requests go to them past Ray."""
