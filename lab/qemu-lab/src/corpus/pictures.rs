//! Computed pictures like those of a camera's sensor, since few systems have any: broad light and shade, shapes with edges, detail at several
//! sizes, and noise in each value; three bytes for each point, line after line. Integer arithmetic makes them the same on every machine.

use sterna_guest::content::{PAGE_BYTES, Page, Random, mix};

use super::Pages;
use crate::Error;

const WIDTH: usize = 1536;
const HEIGHT: usize = 1024;
/// Detail: its size in points (a power of two) and how much it changes a value.
const DETAIL: [(u32, i32); 4] = [(9, 110), (7, 60), (5, 26), (3, 10)];
const SHAPES: usize = 12;
/// Levels of noise, since cameras differ; the best have no visible noise.
const NOISES: u64 = 5;

/// A filled ellipse.
#[derive(Clone, Copy, Debug, Default)]
struct Shape {
    center: (i32, i32),
    radius: (i32, i32),
    colour: [i32; 3],
}

/// Picture after picture.
#[derive(Debug)]
pub(super) struct Pictures {
    seed: u64,
    picture: u64,
    line: usize,
    shapes: [Shape; SHAPES],
    noise: i32,
    /// Computed bytes that were not read yet.
    rest: Vec<u8>,
    taken: usize,
}

impl Pictures {
    pub(super) fn new(seed: u64) -> Self {
        let mut new = Self {
            seed,
            picture: 0,
            line: 0,
            shapes: [Shape::default(); SHAPES],
            noise: 0,
            rest: Vec::new(),
            taken: 0,
        };
        new.compose();
        new
    }

    /// Chooses the picture's shapes and colours.
    fn compose(&mut self) {
        let mut random = Random::new(mix(self.seed) ^ self.picture);
        let mut below = |most: usize| (random.next() % most as u64) as i32;
        for shape in &mut self.shapes {
            *shape = Shape {
                center: (below(WIDTH), below(HEIGHT)),
                radius: (20 + below(WIDTH / 4), 20 + below(HEIGHT / 4)),
                colour: [below(121) - 60, below(121) - 60, below(121) - 60],
            };
        }
        self.noise = (random.next() % NOISES) as i32;
    }

    fn add_line(&mut self) {
        let y = self.line as i32;
        let key = mix(self.seed ^ mix(self.picture));
        let mut random = Random::new(key ^ (self.line as u64) << 32);
        // The part of each shape in this line.
        let spans = self.shapes.map(|shape| {
            let away = i64::from(y - shape.center.1);
            let (rx, ry) = (i64::from(shape.radius.0), i64::from(shape.radius.1));
            let inside = (ry * ry - away * away).max(0);
            let half = (inside as u64).isqrt() as i64 * rx / ry;
            (i64::from(shape.center.0) - half, i64::from(shape.center.0) + half, shape.colour)
        });
        for x in 0..WIDTH as i32 {
            let mut light = 128 + (y - HEIGHT as i32 / 2) / 10;
            for (octave, (size, strength)) in DETAIL.into_iter().enumerate() {
                light += (smooth(key ^ octave as u64, x, y, size) * strength) >> 15;
            }
            let mut point = [light + 6, light, light - 8];
            for (from, to, colour) in &spans {
                if (*from..*to).contains(&i64::from(x)) {
                    point.iter_mut().zip(colour).for_each(|(value, change)| *value += change);
                }
            }
            let mut bits = random.next();
            for value in point {
                // Two dice: a triangle around zero.
                let mut die = || {
                    let thrown = (bits & 0xff) as i32;
                    bits >>= 8;
                    (thrown * (2 * self.noise + 1)) >> 8
                };
                let noise = die() + die() - 2 * self.noise;
                self.rest.push((value + noise).clamp(0, 255) as u8);
            }
        }
        self.line += 1;
        if self.line == HEIGHT {
            (self.line, self.picture) = (0, self.picture + 1);
            self.compose();
        }
    }
}

/// Values at the corners of squares with sides of 2^`size`, and between them in proportion; -16384 … 16383.
fn smooth(key: u64, x: i32, y: i32, size: u32) -> i32 {
    let corner = |x: i32, y: i32| {
        (mix(key ^ (u64::from(x.cast_unsigned()) << 24) ^ u64::from(y.cast_unsigned())) >> 49) as i32 - 16384
    };
    let (left, top) = (x >> size, y >> size);
    let (right, down) = (x & ((1 << size) - 1), y & ((1 << size) - 1));
    let between = |a: i32, b: i32, part: i32| a + (((b - a) * part) >> size);
    let upper = between(corner(left, top), corner(left + 1, top), right);
    let lower = between(corner(left, top + 1), corner(left + 1, top + 1), right);
    between(upper, lower, down)
}

impl Pages for Pictures {
    fn next(&mut self, page: &mut Page) -> Result<bool, Error> {
        while self.rest.len() - self.taken < PAGE_BYTES {
            self.rest.drain(..self.taken);
            self.taken = 0;
            self.add_line();
        }
        page.copy_from_slice(&self.rest[self.taken..self.taken + PAGE_BYTES]);
        self.taken += PAGE_BYTES;
        Ok(true)
    }

    fn origin(&self) -> String {
        format!("pictures of {WIDTH} × {HEIGHT} points of three bytes, computed, with a camera's noise")
    }
}
