//! Classes whose executions often take longer than the grace period, so that a stop interrupts them.

use std::collections::HashMap;

use parking_lot::Mutex;

/// The number of executions of a class that are compared, one bit for each.
const LATEST: u32 = (1 << 20) - 1;
/// So many of them are often.
const OFTEN: u32 = 3;

/// The classes that had an execution longer than the grace period.
#[derive(Default)]
pub(crate) struct Outliving(Mutex<HashMap<String, Class>>);

#[derive(Default)]
struct Class {
    /// A bit for each of the latest executions, set if it was longer.
    longer: u32,
    is_reported: bool,
}

impl Outliving {
    /// Notes an execution. Returns whether the class must be reported now, which happens once.
    pub(crate) fn note(&self, class: &str, is_longer: bool) -> bool {
        let mut classes = self.0.lock();
        if is_longer && !classes.contains_key(class) {
            classes.insert(class.to_owned(), Class::default());
        }
        let Some(class) = classes.get_mut(class) else { return false };
        class.longer = (class.longer << 1 | u32::from(is_longer)) & LATEST;
        let is_new = class.longer.count_ones() >= OFTEN && !class.is_reported;
        class.is_reported |= is_new;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_reported_once_when_three_of_twenty_executions_were_longer() {
        let outliving = Outliving::default();
        let note = |class: &str, is_longer: bool| outliving.note(class, is_longer);
        let every_tenth: Vec<bool> = (0..60).map(|n| note("rare", n % 10 == 0)).collect();
        assert!(!every_tenth.contains(&true), "two of twenty");
        let every_ninth: Vec<usize> = (0..60).filter(|n| note("often", n % 9 == 0)).collect();
        assert_eq!(every_ninth, [18], "the third, and no later one");
        assert_eq!([true, true, true].map(|is_longer| note("rare", is_longer)), [false, true, false], "each class of its own");
    }
}
