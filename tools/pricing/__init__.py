"""Tables of prices: measuring one on this machine (`tuner`), and how good choices by one are on
whole networks (`choices`)."""
