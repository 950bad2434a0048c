"""Values of each test image as short text in a record: booleans with 8 in a byte, and numbers with 4 bytes each, in base64."""

import base64
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def pack_bits(bits: Any) -> str:
    """Return booleans as text: 8 of them in each byte, and the bytes in base64. `bits` is a one-dimensional boolean array.

    10,000 booleans give 1,668 characters. The inverse is `unpack_bits`.
    """
    import numpy as np

    return base64.b64encode(np.packbits(np.asarray(bits, bool)).tobytes()).decode()


def unpack_bits(text: str, count: int) -> "np.ndarray":
    """Return the boolean array that `pack_bits` converted to `text`. `count` is the number of booleans in the array.

    Raises ValueError if the text is no base64, or does not hold `count` booleans.
    """
    import numpy as np

    packed = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    bits = np.unpackbits(packed).astype(bool)
    if count < 1 or len(packed) != -(-count // 8) or bits[count:].any():
        raise ValueError(f"got {len(bits)} bits; expected {count}, filled up with 0 to whole bytes")
    return bits[:count]


def pack_floats(values: Any) -> str:
    """Return numbers as text: each as a float32 of 4 bytes with the lowest byte first, and the bytes in base64. `values` is a
    one-dimensional array.

    10,000 numbers give 53,336 characters. They are rounded to about 7 digits. The inverse is `unpack_floats`.

    Raises ValueError for a number that is NaN, infinite, or too large for a float32.
    """
    import numpy as np

    with np.errstate(over="ignore"):
        rounded = np.asarray(values, "<f4")
    if not np.isfinite(rounded).all():
        raise ValueError("got a number that is infinite or NaN, or too large for a float32; expected finite numbers")
    return base64.b64encode(rounded.tobytes()).decode()


def unpack_floats(text: str, count: int) -> "np.ndarray":
    """Return the numbers that `pack_floats` converted to `text`, as an array of float64. `count` is the number of values.

    Raises ValueError if the text is no base64, does not hold `count` numbers, or if a number is infinite or NaN.
    """
    import numpy as np

    packed = base64.b64decode(text, validate=True)
    if count < 1 or len(packed) != 4 * count:
        raise ValueError(f"got {len(packed)} bytes; expected {count} numbers of 4 bytes")
    values = np.frombuffer(packed, "<f4").astype(float)
    if not np.isfinite(values).all():
        raise ValueError("got a number that is infinite or NaN; expected finite numbers")
    return values
