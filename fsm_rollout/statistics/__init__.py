"""What finished runs say of agents: estimates with their uncertainty, and whether two runs can be told apart."""
