"""What compilers make of partitioned programs: figures of operators, collectives and layouts beside the papers'."""
