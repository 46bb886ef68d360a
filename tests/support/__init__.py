"""What tests share: models, machines, tables of cases, oracles. No tests."""
