"""What answers and judges an agent: users, rewards, and the rule by which answers are compared."""
