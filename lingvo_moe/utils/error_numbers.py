"""Numbers of the errors by which a system refuses to read or write a file, whatever is in it."""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)
# Of a write to an open file: there is no more space, the file would be too large, or the disk fails.
OF_WRITES = (*FULL, errno.EFBIG, errno.EIO)
# A missing permission, or a file server that has restarted or does not answer.
DENIED = (errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT)
# The process or the machine has too many open files, or too little memory.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
