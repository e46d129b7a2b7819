"""The runners, one module or package for each agent."""
