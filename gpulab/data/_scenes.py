"""Two scenes of any length, rendered from a seed: a walk through a town, and moving digits.

The bytes are the same on every platform. For this, floating-point numbers are computed only by
elementwise operations whose rounding IEEE 754 prescribes: + − × ÷, square roots and comparisons.
There are no sums over an axis and no matrix products. The sine is computed here, because C
libraries compute different sines. Random numbers are the raw output of PCG64, which NumPy
guarantees never to change.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpulab.data._base import Bytes

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating]

CHUNK_PIXELS = 1_000_000  # frames are rendered together until they hold about this many pixels


def random_bytes(*key: int, count: int) -> npt.NDArray[np.uint8]:
    """Draw `count` uniform bytes that depend on the integers in `key` alone."""
    # The generator returns 64-bit integers, of 8 bytes each.
    raw = np.random.PCG64(np.random.SeedSequence(key)).random_raw((count + 7) // 8)
    return np.asarray(raw, dtype="<u8").view(np.uint8)[:count]


def uniform(*key: int, count: int) -> Floats:
    """Draw `count` uniform numbers in [0, 1) that depend on the integers in `key` alone.

    Each is a multiple of 2⁻⁵³, which float64 represents exactly.
    """
    mantissas = random_bytes(*key, count=8 * count).view("<u8") >> np.uint64(11)  # 53 of 64 bits
    return mantissas.astype(np.float64) * 2.0**-53


def sine(angle: Floats) -> Floats:
    """Compute sin(angle) with an error of about 1e-9, and with the same bits on every platform.

    The angle is reduced to ±π/2. There the Taylor series up to x¹³ is evaluated.
    """
    turns = np.floor(angle / (2 * np.pi) + 0.5)
    x = angle - turns * (2 * np.pi)
    # The angle is now in ±π. It is reflected at ±π/2, which leaves the sine as it is.
    x = np.where(x > np.pi / 2, np.pi - x, x)
    x = np.where(x < -np.pi / 2, -np.pi - x, x)
    square = x * x
    series = np.ones_like(x)
    # Horner's scheme: each factor 1 / (k (k − 1)) extends the factorials by two numbers.
    for k in (13, 11, 9, 7, 5, 3):
        series = 1.0 - square * series / (k * (k - 1))
    return x * series


def cosine(angle: Floats) -> Floats:
    """Compute cos(angle) in the same way as `sine`."""
    return sine(angle + np.pi / 2)


# --- the walk -------------------------------------------------------------------------------------
# The town is a grid of square cells. Every six cells there is a street two cells wide, and between
# the streets there are houses. The walker keeps to the middle of the street. At each crossing he
# goes straight on or turns along a quarter circle. All lengths are in cells.

BLOCK_PERIOD = 6  # the distance from one street to the next
STREET_WIDTH = 2
EYE_HEIGHT = 0.5
VIEW_DISTANCE = 20.0
TAN_HALF_VIEW = 0.66  # tangent of half the horizontal field of view: 67 degrees
TEXTURE_SIZE = 64  # texels along an edge
HOUSE_TEXTURES = 8  # wall textures
SKIN_COLOUR = np.array([214, 170, 140], np.uint8)


@dataclass(frozen=True)
class Walk:
    """A first-person walk through a textured town with turns, head-bob and pedestrians.

    At a `speed` of 1 the walker covers a street of four units in about 70 frames.

    Examples:
        >>> walk = Walk(seed=0, size=(48, 64))
        >>> next(walk.stream(0, 1)).shape
        (3, 48, 64)
    """

    seed: int
    size: tuple[int, int]
    speed: float = 1.0

    def stream(self, start: int, stop: int, threads: int = 0) -> Iterator[Bytes]:
        """Yield frames `start` to `stop`; with `threads`, chunks of frames are rendered ahead."""
        # Chunks begin at multiples of their length, so that a frame has the same bytes in any
        # stream.
        length = max(1, CHUNK_PIXELS // (self.size[0] * self.size[1]))
        multiples = range((start // length + 1) * length, stop, length)
        boundaries = itertools.chain([start], multiples, [stop])
        chunks = itertools.starmap(functools.partial(_chunk, self), itertools.pairwise(boundaries))
        if not threads:
            yield from itertools.chain.from_iterable(chunk.frames() for chunk in chunks)
            return
        with ThreadPoolExecutor(threads) as pool:
            first_chunks = itertools.islice(chunks, 2 * threads)
            pending_chunks = collections.deque(pool.submit(chunk.frames) for chunk in first_chunks)
            while pending_chunks:
                yield from pending_chunks.popleft().result()
                # The next chunk, if there is one, takes the place of the one that was used.
                pending_chunks.extend(
                    pool.submit(chunk.frames) for chunk in itertools.islice(chunks, 1)
                )

    def render(self, frames: npt.NDArray[np.integer]) -> Bytes:
        """Render the frames with these numbers, shape (len(frames), 3, height, width).

        Frames are the first dimension of arrays, or the second one after x and y. Speeds,
        amplitudes and shades were chosen by eye.
        """
        height, width = self.size
        # The position and heading of the walker in each frame, with the movements of his head.
        distance = frames.astype(np.float64) * (0.055 * self.speed)
        position, heading = _position_at(self.seed, distance)
        step_phase = distance * 7.0  # the phase of a footstep
        heading = heading + 0.16 * sine(distance * 0.9) + 0.01 * sine(step_phase)
        facing = np.stack([cosine(heading), sine(heading)])
        lateral = np.stack([-sine(heading), cosine(heading)])
        position = position + 0.03 * sine(step_phase) * lateral
        horizon = height * (0.5 + 0.012 * sine(step_phase * 2.0) + 0.02 * sine(distance * 0.37))

        # Each column of pixels has one ray, which ends at a house or at `VIEW_DISTANCE`.
        column = ((np.arange(width) + 0.5) * (2.0 / width) - 1.0) * TAN_HALF_VIEW
        ray = facing[:, :, None] + column * lateral[:, :, None]
        depth, wall_position, house, side = _cast_rays(position[:, :, None], ray, self.seed)

        # A row of pixels is given by the tangent of its angle below the horizon. At a wall's depth
        # it is `row * depth` below the eye: ground if below the feet, sky if above the roof.
        f32 = np.float32  # the type in which pixels are computed
        row = (np.arange(height) + 0.5 - horizon[:, None]).astype(f32)[:, :, None] / f32(
            width / (2 * TAN_HALF_VIEW)
        )
        depth32 = depth.astype(f32)[:, None, :]
        roof = (0.7 + 0.25 * (house % 5)).astype(f32)[:, None, :]
        ground = row * depth32 > EYE_HEIGHT
        sky = row * depth32 < -roof

        # The index of each pixel's colour in the atlas of textures, and the distance of the ground.
        ground_distance = np.minimum(EYE_HEIGHT / np.maximum(row, f32(1e-3)), f32(VIEW_DISTANCE))
        position32 = position.astype(f32)[:, :, None, None]
        ray32 = ray.astype(f32)[:, :, None, :]
        tile_x = _texel((position32[0] + ground_distance * ray32[0]) * f32(0.5))
        tile_y = _texel((position32[1] + ground_distance * ray32[1]) * f32(0.5))
        ground_index = tile_y * TEXTURE_SIZE + tile_x
        brick_x = _texel(wall_position.astype(f32))[:, None, :]
        brick_y = _texel(row * depth32 * f32(0.8))
        wall_texture = (1 + house.astype(np.int32) % HOUSE_TEXTURES)[:, None, :]
        wall_index = wall_texture * TEXTURE_SIZE**2 + brick_y * TEXTURE_SIZE + brick_x
        cloud_x = _texel((heading[:, None] + column).astype(f32) * f32(0.7))[:, None, :]
        cloud_y = np.clip((row * f32(-40.0)).astype(np.int32), 0, TEXTURE_SIZE - 1)
        sky_index = (1 + HOUSE_TEXTURES) * TEXTURE_SIZE**2 + cloud_y * TEXTURE_SIZE + cloud_x
        colour = _atlas(self.seed).take(
            np.where(ground, ground_index, np.where(sky, sky_index, wall_index))
        )

        # Distant pixels fade into haze, and walls that face north or south fade more. The
        # visibility is the weight of a pixel's colour, in 1/256. The haze has the grey level 120.
        distance_seen = np.where(ground, ground_distance, depth32)
        visibility = 256 - np.minimum((distance_seen * f32(7.5)).astype(np.int32), 150)
        visibility = np.where(~ground & (side[:, None, :] == 1), visibility * 3 // 4, visibility)
        visibility = np.where(sky, 256, visibility).astype(np.uint16)
        haze = (256 - visibility) * np.uint16(120)
        image = np.empty((len(frames), 3, height, width), np.uint8)
        for channel in range(3):
            shade = (colour >> np.uint32(8 * channel)).astype(np.uint8).astype(np.uint16)
            image[:, channel] = (shade * visibility + haze) >> np.uint16(8)
        self._draw_pedestrians(
            image, distance, (position, facing, lateral), (row[:, :, 0], column, depth)
        )
        return image

    def _draw_pedestrians(
        self, image: Bytes, distance: Floats, eye: tuple[Floats, ...], view: tuple[Floats, ...]
    ) -> None:
        """Draw the pedestrians into the image: the next three in each of the two directions.

        Args:
            image: The frames, which are changed in place.
            distance: The distance that the walker has covered in each frame.
            eye: The walker's position, the direction that he faces, and that to his right.
            view: The tangents of the angles of the rows and of the columns of pixels, and the depth
                of the wall in each column.
        """
        position, facing, right = eye
        # Pedestrians follow the walker's path. Their pace is a share of the walker's: negative for
        # those who come towards him. Meetings are numbered along the path, one every `spacing`.
        row, column, depth = view
        walks_away = np.repeat([0, 1], 3)
        pace = np.repeat([-0.6, 0.45], 3)
        spacing = np.repeat([3.7, 6.1], 3)
        distances = distance[:, None]  # (frames, 1), to be combined with six people
        # At the distance d of the walker, pedestrian n is at n · spacing + pace · d. The next one
        # ahead is therefore the first n above d (1 − pace) / spacing; the next three are drawn.
        encounter = (
            np.floor((distances * (1.0 - pace) + 0.3) / spacing).astype(np.int64)
            + 1
            + np.tile(np.arange(3), 2)
        )
        person = np.abs(encounter * 2 + walks_away)
        # A hash of the meeting, in [0, 1), varies the pedestrian's position.
        jitter = ((encounter * 2654435761 + self.seed * 97 + walks_away * 31) % 1009) / 1009.0
        offset = np.where(encounter % 2 == 0, 0.35, -0.35) + 0.3 * (jitter - 0.5)
        path_distance = encounter * spacing + jitter + distances * pace
        relative, heading = _position_at(self.seed, path_distance)
        relative = (
            relative + offset * np.stack([-sine(heading), cosine(heading)]) - position[:, :, None]
        )
        forward_x, forward_y = relative * facing[:, :, None]
        right_x, right_y = relative * right[:, :, None]
        forward = forward_x + forward_y
        lateral = right_x + right_y
        frame = np.arange(len(distance))
        palette = 40 + random_bytes(self.seed, 5, count=3 * 64).reshape(64, 3) // 2
        for order in np.argsort(-forward, axis=1, kind="stable").T:  # the nearest last
            person_number = person[frame, order]
            z = forward[frame, order]  # the distance in front of the walker; negative behind him
            clipped_z = np.maximum(z, 0.2)
            phase = distance * 9.0 + person_number * 1.7
            # Heights above the ground, in cells: feet 0, hips 0.26, chin 0.42, crown 0.56.
            height_above_ground = EYE_HEIGHT - row * clipped_z[:, None]
            legs = 0.05 + 0.03 * sine(phase)[:, None] * (0.26 - height_above_ground) * 4.0
            from_face = height_above_ground - 0.49
            head = 0.8 * np.sqrt(np.maximum(0.0049 - from_face * from_face, 0.0))
            half_width = np.where(
                height_above_ground > 0.42, head, np.where(height_above_ground > 0.26, 0.085, legs)
            )
            # Nobody is drawn below the ground, behind the walker or directly in front of him.
            half_width = np.where((height_above_ground < 0) | (z < 0.25)[:, None], 0.0, half_width)
            lateral_distance = (
                np.abs(column - (lateral[frame, order] / clipped_z)[:, None]) * clipped_z[:, None]
            )
            # A house nearer than the pedestrian hides him: no half width reaches this distance.
            lateral_distance = np.where(depth < clipped_z[:, None], 9.0, lateral_distance)
            visible_rows = np.flatnonzero(half_width.any(0))
            visible_columns = np.flatnonzero((lateral_distance < half_width.max()).any(0))
            if not (len(visible_rows) and len(visible_columns)):
                continue
            rows = slice(visible_rows[0], visible_rows[-1] + 1)
            columns = slice(visible_columns[0], visible_columns[-1] + 1)
            mask = (
                lateral_distance.astype(np.float32)[:, None, columns]
                < half_width.astype(np.float32)[:, rows, None]
            )
            coat = palette[person_number % 64, :, None]
            trousers = palette[(person_number * 7 + 3) % 64, :, None] // 2
            visible_height = height_above_ground[:, None, rows]
            clothes = np.where(visible_height > 0.26, coat, trousers)
            paint = np.where(visible_height > 0.42, SKIN_COLOUR[:, None], clothes)
            np.copyto(image[:, :, rows, columns], paint[..., None], where=mask[:, None])


class _Chunk:
    """Frames rendered once, by the first thread that needs them; the other threads wait."""

    def __init__(self, walk: Walk, start: int, stop: int) -> None:
        self.walk = walk
        self.numbers = np.arange(start, stop)
        self.lock = threading.Lock()
        self.rendered = np.empty(0, np.uint8)

    def frames(self) -> Bytes:
        """Return all frames of the chunk as a read-only array; the first call renders them."""
        with self.lock:
            if not len(self.rendered):
                self.rendered = self.walk.render(self.numbers)
                self.rendered.flags.writeable = False
            return self.rendered


# A cache of about 12 MB, for several streams that read the same frames.
_chunk = functools.lru_cache(maxsize=4)(_Chunk)


@contextlib.contextmanager
def remembered_chunks(count: int) -> Iterator[None]:
    """Keep the last `count` chunks, of 3 MB each, in memory inside the block.

    This serves training runs that read the same film at different positions. The cache is global.
    """
    global _chunk
    previous_cache = _chunk
    _chunk = functools.lru_cache(maxsize=count)(_Chunk)
    try:
        yield
    finally:
        _chunk = previous_cache


# The steps along x and y (rows) for each heading, in quarter turns (columns).
HEADING_STEPS = np.array([[1, 0, -1, 0], [0, 1, 0, -1]])
CROSSINGS_PER_BLOCK = 256  # the number of random turns that are drawn together


@functools.lru_cache(maxsize=8)
def _path_pieces(seed: int, blocks: int) -> tuple[Floats, Integers, Integers, Integers]:
    """Compute the pieces of the walker's path, which are alternately streets and crossings.

    Returns:
        Four arrays with an element for each piece: the distance along the path at which the piece
        begins; the place at which it begins (x and y on the first axis); the heading there, in
        quarter turns; and the direction of its turn, -1, 0 (straight on) or 1.
    """
    draws = np.concatenate(
        [random_bytes(seed, 1, block, count=CROSSINGS_PER_BLOCK) for block in range(blocks)]
    )
    crossing_turns = np.array([0, -1, 1])[draws % 3]
    street_turns = np.zeros(len(draws), np.int64)
    turns = np.stack([street_turns, crossing_turns], axis=1).ravel()
    # The walk begins with the heading 1. A heading includes the turns of all earlier pieces: the
    # cumulative sum without the piece's own turn.
    headings = 1 + np.cumsum(turns) - turns
    lengths = np.where(turns == 0, STREET_WIDTH, 1)  # a turn moves one cell forward
    lengths[::2] = BLOCK_PERIOD - STREET_WIDTH  # streets
    # From one end of a piece to the other: forward, and in a turn also one cell to the side.
    moves = lengths * HEADING_STEPS[:, headings % 4] + turns * HEADING_STEPS[:, (headings + 1) % 4]
    places = np.array([[1], [STREET_WIDTH]]) + np.cumsum(moves, axis=1) - moves
    # `cumsum` adds numbers one after the other, so its rounding is the same on every platform. The
    # rounding of `sum` is not.
    ends = np.cumsum(np.where(turns == 0, lengths, np.pi / 2))
    starts = np.append(0.0, ends[:-1])
    return starts, places, headings, turns


def _position_at(seed: int, distance: Floats) -> tuple[Floats, Floats]:
    """Compute the walker's position after each distance, and his heading in radians.

    The first axis of the position is x and y. Negative distances count as 0.

    >>> place, heading = _position_at(0, np.array([10.0, 5000.0]))
    >>> place.round(2).tolist(), heading.round(2).tolist()
    ([[6.42, 83.77], [6.91, -173.0]], [-0.43, -78.54])
    """
    distance = np.maximum(distance, 0.0)
    # An upper bound on the number of crossings: each follows a street, and a turn, of length π/2,
    # is the shortest crossing.
    crossings = int(distance.max(initial=0.0) / (BLOCK_PERIOD - STREET_WIDTH + np.pi / 2))
    starts, places, headings, turns = _path_pieces(seed, 1 + crossings // CROSSINGS_PER_BLOCK)
    piece = np.searchsorted(starts, distance, side="right") - 1
    distance_along = distance - starts[piece]
    quarter = headings[piece]
    turn = turns[piece]
    # A turn follows a quarter circle of radius one: forward by sin, to the side by 1 − cos.
    forward = np.where(turn == 0, distance_along, sine(distance_along))
    lateral = turn * (1.0 - cosine(distance_along))
    position = (
        places[:, piece]
        + forward * HEADING_STEPS[:, quarter % 4]
        + lateral * HEADING_STEPS[:, (quarter + 1) % 4]
    )
    return position, quarter * (np.pi / 2) + turn * distance_along


def _cast_rays(
    position: Floats, ray: Floats, seed: int
) -> tuple[Floats, Floats, Integers, Integers]:
    """Follow each ray through the grid until it hits a house (Amanatides and Woo 1987).

    The position has shape (2, frames, 1), and the rays have shape (2, frames, width). The first
    axis is x and y. A ray that hits no house ends at `VIEW_DISTANCE`.

    Returns:
        Four arrays of shape (frames, width): the depth along the view, the position across the
        wall in [0, 1), the number of the house, and the side that was hit (0 for east or west, 1
        for north or south).
    """
    cell = np.broadcast_to(np.floor(position).astype(np.int64), ray.shape)
    ray = np.where(np.abs(ray) < 1e-9, 1e-9, ray)  # avoids a division by zero
    is_forward = ray > 0
    step = np.where(is_forward, 1, -1)
    cell_depth = np.abs(1.0 / ray)  # the depth in which a ray crosses one cell, along x and y
    # The depths at which a ray crosses the next cell boundaries, along x and along y.
    distance_to_boundary = np.where(is_forward, cell + 1.0 - position, position - cell)
    next_walls = distance_to_boundary * cell_depth
    depth = np.zeros_like(ray[0])
    side = np.zeros(ray.shape[1:], dtype=np.int64)
    is_travelling = np.ones(side.shape, dtype=bool)
    while is_travelling.any():
        crosses_y = next_walls[0] >= next_walls[1]
        depth = np.where(is_travelling, np.minimum(*next_walls), depth)
        side = np.where(is_travelling, crosses_y, side)
        advance = np.stack([is_travelling & ~crosses_y, is_travelling & crosses_y])
        cell = cell + step * advance
        next_walls = next_walls + cell_depth * advance
        in_house = (cell % BLOCK_PERIOD >= STREET_WIDTH).all(0)
        is_travelling &= ~in_house & (depth < VIEW_DISTANCE)
    depth = np.clip(depth, 0.05, VIEW_DISTANCE)
    # The coordinate along the wall: y for a wall that faces east or west, otherwise x.
    hit = np.where(side == 0, position[1] + depth * ray[1], position[0] + depth * ray[0])
    # A hash of the block's coordinates and the seed, which selects the texture and the height.
    house = (
        (cell[0] // BLOCK_PERIOD) * 73856093
        + (cell[1] // BLOCK_PERIOD) * 19349663
        + seed * 83492791
    ) % 1013
    return depth, hit - np.floor(hit), house, side


def _texel(position: Floats) -> npt.NDArray[np.int32]:
    """Convert a position to the number of a texel; textures repeat at every integer position."""
    # `TEXTURE_SIZE` is a power of two, so the bitwise `and` is the remainder.
    return np.floor(position * np.float32(TEXTURE_SIZE)).astype(np.int32) & (TEXTURE_SIZE - 1)


@functools.lru_cache(maxsize=8)
def _atlas(seed: int) -> npt.NDArray[np.uint32]:
    """Draw the textures of the ground, the house fronts and the sky, as one flat array of colours.

    The array has 10·64·64 elements. Each holds red, green and blue in its three lowest bytes, red
    in the lowest.
    """
    noise = [_noise(seed, 2, k) for k in range(2 + HOUSE_TEXTURES)]
    tints = (
        random_bytes(seed, 3, count=3 * HOUSE_TEXTURES).reshape(HOUSE_TEXTURES, 3).astype(np.int64)
    )
    u, v = np.meshgrid(np.arange(TEXTURE_SIZE), np.arange(TEXTURE_SIZE))  # column and row
    # The first texture is the ground: slabs of 32 texels with dark joints.
    slabs = np.where((u % 32 < 2) | (v % 32 < 2), 40, 70 + noise[0] // 3)
    textures = [np.stack([slabs, slabs, slabs - 8], axis=-1)]
    # House fronts: bricks in mortar, with windows at one of three distances.
    for k in range(HOUSE_TEXTURES):
        pitch = (16, 32, 21)[k % 3]
        front = (70 + tints[k] * 120 // 255) * (128 + noise[1 + k][..., None] // 2) // 255
        window = (u % pitch > pitch // 3) & (v % 32 > 10) & (v % 32 < 24)
        mortar = (v % 8 == 0) | ((u + 4 * (v // 8)) % 16 == 0)
        front = np.where(mortar[..., None], front * 3 // 4, front)
        pane = np.array([52, 62, 80]) + noise[1 + k][..., None] // 8
        textures.append(np.where(window[..., None], pane, front))
    # The last texture is the sky, which is bluer higher up.
    clouds = noise[1 + HOUSE_TEXTURES]
    height = np.minimum(v * 2, 80)
    textures.append(
        np.stack(
            [150 - height + clouds // 3, 175 - height // 2 + clouds // 4, 215 + clouds // 8],
            axis=-1,
        )
    )
    pixels = np.clip(np.concatenate(textures), 0, 255).astype(np.uint32).reshape(-1, 3)
    red, green, blue = pixels.T
    return red | green << np.uint32(8) | blue << np.uint32(16)


def _noise(*key: int) -> Integers:
    """Draw value noise of five octaves, shape (64, 64), from 0 to 255, which repeats seamlessly."""
    total = np.zeros((TEXTURE_SIZE, TEXTURE_SIZE), dtype=np.int64)
    for octave, cells in enumerate((4, 8, 16, 32, 64)):
        grid = (
            random_bytes(*key, octave, count=cells * cells).reshape(cells, cells).astype(np.int64)
        )
        scale = TEXTURE_SIZE // cells
        cell, offset = np.divmod(np.arange(TEXTURE_SIZE)[:, None], scale)
        column = np.arange(cells)
        # Bilinear interpolation between the grid's cells. The weights are integers, so that the
        # matrix products are exact.
        is_cell = column == cell
        is_next_cell = column == (cell + 1) % cells
        weights = (scale - offset) * is_cell + offset * is_next_cell
        total += weights @ grid @ weights.T // scale**2 * (16 >> octave)  # weighted 16, 8, 4, 2, 1
    return total // 31  # 31 is the sum of these five weights


# --- moving digits --------------------------------------------------------------------------------


class MovingDigits:
    """A scene of two digits that move and bounce off the edges (Srivastava et al. 2015).

    The digits are chosen from `digits`, bytes of shape (N, 28, 28). Every `LIFE` frames two new
    digits, with new positions and velocities, replace them.
    """

    LIFE = 100

    def __init__(self, digits: Bytes, seed: int, size: tuple[int, int], speed: float = 1.0) -> None:
        self.digits = digits
        self.seed = seed
        self.size = size
        self.speed = speed

    def stream(self, start: int, stop: int, threads: int = 0) -> Iterator[Bytes]:  # noqa: ARG002
        """Yield frames `start` to `stop`."""
        return map(self.frame, range(start, stop))

    def frame(self, number: int) -> Bytes:
        """Render the frame with this number, shape (3, height, width)."""
        height, width = self.size
        scene, age = divmod(number, self.LIFE)
        picture = np.zeros((height, width), dtype=np.uint8)
        draws = uniform(self.seed, 7, scene, count=10).reshape(2, 5)  # five for each digit
        for digit_share, row, row_velocity, column, column_velocity in draws:
            digit = self.digits[int(digit_share * len(self.digits))][:height, :width]
            top = _bounce(row, row_velocity, age * self.speed, height - digit.shape[0])
            left = _bounce(column, column_velocity, age * self.speed, width - digit.shape[1])
            # Where the digits overlap, the brighter one is seen.
            patch = picture[top : top + digit.shape[0], left : left + digit.shape[1]]
            np.maximum(patch, digit, out=patch)
        return np.repeat(picture[None], 3, axis=0)


def _bounce(start: float, velocity: float, age: float, extent: int) -> int:
    """Compute the position, from 0 to `extent`, of an object that bounces between the two ends.

    `start` and `velocity` are in [0, 1). The object moves by 1 to 3 pixels in each frame of `age`.
    """
    period = 2 * extent or 1  # avoids a division by zero; the result is 0 if `extent` is 0
    # The distance covered, without the bouncing, wraps around after a way back and forth. It is
    # then folded: the second half of the period is the way back.
    unfolded = (start * 2 * extent + (1.0 + 2.0 * velocity) * age) % period
    return int(extent - abs(unfolded - extent))
