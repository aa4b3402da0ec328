"""Any server that speaks OpenAI's interface, behind the contract: another machine computes, this side serves."""
