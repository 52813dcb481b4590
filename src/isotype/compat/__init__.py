"""Other libraries' insides, one file a library: what is read or changed there, why, and which versions it was tried with."""
