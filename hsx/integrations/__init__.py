"""Stores read by trainers as they are, with no export; each module is imported only where its trainer is used."""
