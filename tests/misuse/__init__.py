"""What users get wrong, as tables: the command line answers each with its exact line."""
