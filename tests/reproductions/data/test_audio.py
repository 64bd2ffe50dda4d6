"""WAV and AU bit by bit, the log-mel front end against an independent one, FSDD and GTZAN."""

import struct

import numpy as np
import pytest
import torch

from dampen.studies.data import DamagedData, IncompleteData, MissingData, load
from reproductions.data.gtzan import precompute
from reproductions.data.mel import LogMel, resample, stack_frames
from reproductions.data.waves import read_audio
from tests.reproductions.data import writers


def riff(tag, channels, rate, bits, data, extra=b""):
    width = channels * bits // 8
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * width, width, bits) + extra
    chunks = b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"LIST" + struct.pack("<I", 3) + b"abc\0"  # an odd chunk, padded to even length
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


EXACT = np.array([0.0, 0.5, -0.5, -1.0, 0.25, 0.125])
CODES = {
    "u8": (1, 8, lambda x: (x * 128 + 128).astype(np.uint8).tobytes()),
    "i16": (1, 16, lambda x: (x * 2**15).astype("<i2").tobytes()),
    "i24": (
        1,
        24,
        lambda x: b"".join(int(v * 2**23).to_bytes(3, "little", signed=True) for v in x),
    ),
    "i32": (1, 32, lambda x: (x * 2**31).astype("<i4").tobytes()),
    "f32": (3, 32, lambda x: x.astype("<f4").tobytes()),
    "f64": (3, 64, lambda x: x.astype("<f8").tobytes()),
}


@pytest.mark.parametrize("code", CODES)
def test_wav_encodings(tmp_path, code):
    tag, bits, encode = CODES[code]
    path = tmp_path / "a.wav"
    path.write_bytes(riff(tag, 1, 8000, bits, encode(EXACT)))
    samples, rate = read_audio(path)
    assert rate == 8000
    assert samples.dtype == np.float32
    np.testing.assert_array_equal(samples, EXACT)
    path.write_bytes(
        riff(tag, 2, 8000, bits, encode(EXACT))
    )  # the same bytes as 3 frames of stereo
    np.testing.assert_array_equal(read_audio(path)[0], EXACT.reshape(3, 2).mean(axis=1))
    guid = struct.pack("<HHIH", 22, bits, 0, tag) + b"\0" * 14
    path.write_bytes(
        riff(0xFFFE, 1, 8000, bits, encode(EXACT), guid)
    )  # the extensible form of the header
    np.testing.assert_array_equal(read_audio(path)[0], EXACT)


@pytest.mark.parametrize(
    ("encoding", "bits"), [(2, 8), (3, 16), (4, 24), (5, 32), (6, 32), (7, 64)]
)
@pytest.mark.parametrize("size_known", [True, False])
def test_au_encodings(tmp_path, encoding, bits, size_known):
    if encoding >= 6:
        data = EXACT.astype(f">f{bits // 8}").tobytes()
    else:
        data = b"".join(
            int(v * 2 ** (bits - 1)).to_bytes(bits // 8, "big", signed=True) for v in EXACT
        )
    size = len(data) if size_known else 0xFFFFFFFF
    path = tmp_path / "a.au"
    path.write_bytes(
        struct.pack(">4s5I", b".snd", 32, size, encoding, 22050, 1) + b"note...." + data
    )
    samples, rate = read_audio(path)
    assert rate == 22050
    np.testing.assert_array_equal(samples, EXACT)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected RIFF"),
        (b"ID3 an mp3 file", "expected RIFF"),
        (riff(1, 1, 8000, 16, b"\0" * 100)[:-40], r"got 116 bytes, expected 156"),
        (riff(2, 1, 8000, 16, b"\0" * 4), "compressed .format tag 2."),
        (riff(1, 1, 8000, 12, b"\0" * 4), "12-bit"),
        (riff(1, 2, 8000, 16, b"\0" * 6), "multiple of 4"),
        (riff(1, 1, 8000, 16, b""), "more than none"),
        (riff(3, 1, 8000, 32, struct.pack("<f", float("nan"))), "infinite or undefined"),
        (b"RIFF\0\0\0\0WAVEdata\x04\0\0\0\0\0\0\0", "data chunk first|chunk first"),
        (b"RIFF\0\0\0\0WAVE", "without a data chunk"),
        (b".snd\0\0", "at least 24"),
        (
            struct.pack(">4s5I", b".snd", 24, 100, 3, 8000, 1) + b"\0" * 10,
            "got 34 bytes, expected 124",
        ),
        (struct.pack(">4s5I", b".snd", 24, 4, 1, 8000, 1) + b"\0" * 4, "AU encoding 1"),
    ],
)
def test_damaged_audio_is_named(tmp_path, content, words):
    path = tmp_path / "clip.wav"
    path.write_bytes(content)
    with pytest.raises(DamagedData, match=words) as caught:
        read_audio(path)
    assert "clip.wav" in str(caught.value)


def test_log_mel_agrees_with_an_independent_front_end():
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    wave = np.random.default_rng(0).normal(0, 0.1, 8000)
    front = LogMel(rate=8000, fft=512, hop=80, bands=40)
    reference_filters = mel_filter_bank(257, 40, 0.0, 4000.0, 8000, norm=None, mel_scale="htk")
    np.testing.assert_allclose(front.filters().numpy(), reference_filters, atol=1e-6)
    reference = spectrogram(
        wave,
        window_function(512, "hann", periodic=True),
        frame_length=512,
        hop_length=80,
        fft_length=512,
        power=2.0,
        center=True,
        pad_mode="reflect",
        mel_filters=reference_filters,
        mel_floor=1e-8,
        log_mel="dB",
        min_value=1e-8,
    )
    np.testing.assert_allclose(
        front(torch.from_numpy(wave).float()).numpy().T, reference, atol=2e-3
    )


def test_a_tone_lands_in_its_band():
    front = LogMel(rate=8000, fft=512, hop=80, bands=40)
    for frequency in (300, 1000, 2500):
        mel = front(torch.from_numpy(writers.tone(frequency, 0.5, 8000)).float())[10:-10].mean(
            dim=0
        )
        nearest = (front.filters()[round(frequency / 8000 * 512)]).argmax()
        assert mel.argmax() == nearest


def test_front_end_edges():
    front = LogMel(rate=8000, fft=512, hop=80, bands=40)
    assert front(torch.zeros(1)).shape == (4, 40)  # one sample, then silence
    assert front(torch.zeros(800)).max() == -80.0
    assert torch.isfinite(front(torch.zeros(3, 1000))).all()
    area = (
        LogMel(rate=8000, fft=4096, hop=80, bands=20, area=True).filters().sum(dim=0) * 8000 / 4096
    )
    torch.testing.assert_close(area, torch.ones(20), atol=0.02, rtol=0)
    with pytest.raises(ValueError, match="low < high"):
        LogMel(rate=8000, high=9000)
    with pytest.raises(ValueError, match="from 1"):
        stack_frames(torch.zeros(3, 2), 0)


def test_resampling_keeps_a_tone():
    wave = writers.tone(440, 0.5, 44100).astype(np.float32)
    other = resample(wave, 44100, 22050)
    expected = writers.tone(440, 0.5, 22050)
    assert np.abs(other - expected)[200:-200].max() < 0.01
    assert resample(wave, 8000, 8000) is wave


def test_fsdd_official_test_and_drawn_validation(tmp_path):
    writers.fsdd(tmp_path / "fsdd")
    with pytest.raises(IncompleteData, match="160 of 3000 recordings"):
        load("fsdd", tmp_path)
    dataset = load("fsdd", tmp_path, partial=True)
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (
        42,
        18,
        100,
    )  # index < 5 is test
    assert torch.bincount(dataset.test.target).tolist() == [10] * 10
    assert dataset.model_args == {
        "features": 160,
        "classes": 10,
        "max_tokens": 32,
        "per_token": False,
    }
    x, padding = dataset.train.batch([0, 1])["inputs"]
    assert x.shape == (2, 32, 160)
    assert padding[0].any()
    # 0.2 s + 0.05 s * index at 10 ms a frame and 4 frames a token
    assert set(dataset.test.lengths.tolist()) == {-(-(21 + 5 * i) // 4) for i in range(5)}
    same = load("fsdd", tmp_path / "fsdd" / "recordings", partial=True)
    assert same.info["sha256"] == dataset.info["sha256"]


def test_fsdd_needs_test_recordings(tmp_path):
    writers.fsdd(tmp_path, indices=range(5, 8))
    with pytest.raises(DamagedData, match="0 test recordings"):
        load("fsdd", tmp_path, partial=True)


def test_gtzan_precomputed_with_its_split(tmp_path):
    folder = writers.gtzan_mel(tmp_path / "gtzan")
    with pytest.raises(IncompleteData, match="80 of 1000 clips"):
        load("gtzan", tmp_path)
    dataset = load("gtzan", tmp_path, partial=True)
    assert dataset.model_args == {
        "features": 128,
        "classes": 10,
        "max_tokens": 129,
        "per_token": False,
    }
    with np.load(folder / "mel64.npz") as table:
        mel = table["mel"][0]
    frames = mel[:, 5:10]  # the second token of the first clip
    token = torch.from_numpy(np.concatenate([frames.mean(axis=1), frames.std(axis=1)]))
    token = (token - dataset.normalization.mean) / dataset.normalization.std
    torch.testing.assert_close(
        dataset.train.batch([0])["inputs"][0][0, 1], token, atol=1e-4, rtol=1e-4
    )
    with pytest.raises(ValueError, match="statistics, stack: got 'pile'"):
        load("gtzan", tmp_path, partial=True, tokens="pile")

    dataset = load("gtzan", tmp_path, partial=True, tokens="stack")
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (40, 20, 10)
    assert dataset.info["left_out"] == 10
    assert dataset.info["split"].startswith("official")
    assert dataset.model_args == {
        "features": 320,
        "classes": 10,
        "max_tokens": 129,
        "per_token": False,
    }
    (x,) = dataset.train.batch([0])["inputs"]  # all clips are full: no padding mask
    token = (
        torch.from_numpy(mel[:, 5:10].T.reshape(-1)) - dataset.normalization.mean
    ) / dataset.normalization.std
    torch.testing.assert_close(x[0, 1], token)
    assert len(load("gtzan", tmp_path, partial=True, limit=20).train) == 20


@pytest.mark.parametrize("suffix", ["au", "wav"])
def test_gtzan_audio_with_and_without_the_filtered_split(tmp_path, suffix):
    root = tmp_path / "genres"
    for label, genre in enumerate(writers.GENRES):
        for i in range(4):
            samples = writers.tone(200 + 200 * label, 1.0, 22050)
            getattr(writers, suffix)(root / genre / f"{genre}.{i:05d}.{suffix}", samples, 22050)
    dataset = load("gtzan", tmp_path, partial=True, frames=20, stack=2)
    assert dataset.info["split"] == "drawn by genre"
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (21, 9, 10)
    assert any("no official split" in words for words in dataset.info["departures"])
    assert dataset.model_args["features"] == 128
    for number, part in enumerate(("train", "valid", "test")):
        lines = "".join(f"{genre}/{genre}.{number:05d}.wav\n" for genre in writers.GENRES)
        (tmp_path / f"{part}_filtered.txt").write_text(lines)
    dataset = load("gtzan", tmp_path, partial=True, frames=20, stack=2)
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (10, 10, 10)
    assert dataset.info["left_out"] == 10

    path = precompute(root, tmp_path / "mel64.npz", partial=True)
    fast = load("gtzan", path, partial=True, frames=20, stack=2)
    torch.testing.assert_close(
        fast.train.batch([3])["inputs"][0], dataset.train.batch([3])["inputs"][0]
    )

    victim = root / "jazz" / f"jazz.00001.{suffix}"
    victim.write_bytes(victim.read_bytes()[:1000])
    with pytest.raises(DamagedData, match=r"jazz.00001.*got 1000 bytes"):
        load("gtzan", root)
    assert any(
        "jazz.00001" in words for words in load("gtzan", root, partial=True).info["departures"]
    )


def test_a_damaged_mel_file_is_named(tmp_path):
    folder = writers.gtzan_mel(tmp_path / "gtzan")
    content = (folder / "mel64.npz").read_bytes()
    (folder / "mel64.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedData, match=rf"mel64.npz \({len(content) // 2} bytes\)"):
        load("gtzan", tmp_path)
    np.savez(folder / "mel64.npz", mel=np.zeros((2, 64, 645)))
    with pytest.raises(DamagedData, match="label"):
        load("gtzan", tmp_path)
    objects = np.array([{"a": 1}], dtype=object)  # would need a pickle
    np.savez(
        folder / "mel64.npz",
        mel=objects,
        label=objects,
        split=objects,
        name=objects,
        classes=objects,
    )
    with pytest.raises(DamagedData, match=r"mel64.npz"):
        load("gtzan", tmp_path)
    with pytest.raises(MissingData, match="MARSYAS"):
        load("gtzan", tmp_path / "nowhere")


@pytest.mark.slow
def test_real_fsdd_and_gtzan(real_data):
    path, real = real_data("fsdd")
    spoken = load("fsdd", path, partial=not real)
    path, _ = real_data("gtzan")
    genres = load("gtzan", path, partial=not real)
    for dataset in (spoken, genres):
        (x, *_) = dataset.train.batch(range(8))["inputs"]
        assert torch.isfinite(x).all()
        assert x.abs().max() < 20
    if real:
        assert (len(spoken.train), len(spoken.valid), len(spoken.test)) == (1890, 810, 300)
        assert torch.bincount(spoken.test.target).tolist() == [30] * 10
        assert spoken.info["departures"] == []
        assert (len(genres.train), len(genres.valid), len(genres.test)) == (443, 197, 290)
        assert genres.info["left_out"] == 70
        assert genres.classes == writers.GENRES
