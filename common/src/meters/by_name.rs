//! Handles for each value of a label that people choose: the name of a group, a class, a resource.

use std::collections::HashMap;

/// Maximum number of names that a label has of each kind, in one process. Further names share [`OTHER`].
pub const MOST_NAMES: usize = 100;
/// The value of a label for the names that have none of their own.
pub const OTHER: &str = "other";

/// The handles of the first [`MOST_NAMES`] names, and those of all further names.
///
/// A name keeps its handles while the process lives: a counter must not begin again, and a gauge that is not set would keep its last value.
pub struct ByName<H> {
    make: fn(&str) -> H,
    known: HashMap<String, H>,
    other: Option<H>,
}

impl<H> ByName<H> {
    /// Without names. `make` makes the handles of a name.
    pub fn new(make: fn(&str) -> H) -> Self {
        Self { make, known: HashMap::new(), other: None }
    }

    /// The handles of a name.
    pub fn of(&mut self, name: &str) -> &mut H {
        if !self.known.contains_key(name) {
            if self.known.len() >= MOST_NAMES {
                return self.other.get_or_insert_with(|| (self.make)(OTHER));
            }
            self.known.insert(name.to_owned(), (self.make)(name));
        }
        self.known.get_mut(name).expect("it is known or was added")
    }

    /// Whether a name has handles of its own, or gets them.
    pub fn has_room_for(&self, name: &str) -> bool {
        self.known.contains_key(name) || self.known.len() < MOST_NAMES
    }

    /// All handles.
    pub fn all(&mut self) -> impl Iterator<Item = &mut H> {
        self.known.values_mut().chain(&mut self.other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_names_have_handles_of_their_own_and_all_further_ones_share_one() {
        let mut names = ByName::new(str::to_owned);
        for number in 0..MOST_NAMES {
            assert!(names.has_room_for(&number.to_string()));
            assert_eq!(*names.of(&number.to_string()), number.to_string());
        }
        assert!(names.has_room_for("7") && !names.has_room_for("more"));
        assert_eq!(names.of("more"), OTHER);
        assert_eq!(names.of("even more"), OTHER);
        assert_eq!((names.of("7").clone(), names.all().count()), ("7".into(), MOST_NAMES + 1));
    }
}
