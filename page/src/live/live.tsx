/** The live engine view, at #/live. */
export function LivePanel() {
  return (
    <section class="panel" aria-labelledby="live-title">
      <h1 id="live-title">Live engine</h1>
      <p class="muted">Nothing to show yet.</p>
    </section>
  );
}
