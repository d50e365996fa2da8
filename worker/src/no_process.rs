//! Without the feature `process`: a compiler error that names the feature, in place of "no method".

use crate::Worker;

/// Not implemented by anything.
#[diagnostic::on_unimplemented(
    message = "`Worker::main` and `Worker::about` need the feature `process` of recruiter-worker",
    label = "write `features = [\"process\"]` in Cargo.toml"
)]
pub trait HasProcess {}

// The bound has a lifetime, because the compiler refuses the definition of a function with a bound that nothing can meet.
impl Worker {
    /// Needs the feature `process`.
    #[must_use]
    pub fn about(self, _: impl Into<String>) -> Self
    where
        for<'a> &'a Self: HasProcess,
    {
        self
    }

    /// Needs the feature `process`.
    pub async fn main(self) -> !
    where
        for<'a> &'a Self: HasProcess,
    {
        unreachable!("nothing implements `HasProcess`")
    }
}
