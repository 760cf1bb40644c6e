"""What every figure has to keep, whatever it shows."""

import io

import numpy as np
from matplotlib.image import imread


def check_said_and_uncut(figure):
    """It has words and numbers, and nothing of it reaches the edge, where text would be cut."""
    assert len(figure.alt) > 60
    assert figure.data
    pixels = imread(io.BytesIO(figure.png))[..., :3]
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (edge > 0.99).all()
