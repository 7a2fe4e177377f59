"""Recurrent states: when they change, how they are restored, and whether a model continues from them."""
