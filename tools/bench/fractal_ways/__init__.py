"""Functions over nests beside what people would run instead: nests, ways to run them, figures."""
