"""A recorded load against a live address: requests leave at their time, whatever comes back."""
