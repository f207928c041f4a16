"""The parts of the fault campaign: what is planted, the runs it is planted into, and the judge."""
