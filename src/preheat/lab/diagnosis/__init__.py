"""Finds out why cached tokens are zero: from an engine, from its events, from a log of prompts.

Each check says what was asked, what was seen and what to do. No prompt of anybody's is ever sent:
the doctor's own are drawn at random. Of a log no text is told, only places and kinds of text.
"""
