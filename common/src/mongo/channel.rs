//! The capped collections that workers read hints from.

/// Prefix of the names of the channels' collections.
const CHANNEL: &str = "signals_";

/// Maximum number of channels.
pub(crate) const CHANNELS: u32 = 32;

/// One of the capped collections that workers read hints from: `signals_0`, `signals_1` and so on. A few dozen workers
/// share one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Channel(pub u32);

impl Channel {
    pub(crate) fn collection(self) -> String {
        format!("{CHANNEL}{}", self.0)
    }

    /// The channel of a collection of this name, if workers can have it.
    pub(crate) fn of_collection(name: &str) -> Option<Self> {
        (0..CHANNELS).map(Self).find(|channel| channel.collection() == name)
    }

    /// Whether this is the name of a channel's collection.
    pub(crate) fn is_collection(name: &str) -> bool {
        name.strip_prefix(CHANNEL).is_some_and(|number| number.parse::<u32>().is_ok())
    }
}
